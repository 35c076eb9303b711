"""The data flow's buffers, lanes and streams over ZeroMQ, and the control flow's gRPC channels."""
