"""Wire formats: frames and chunks of the data flow, and protobuf messages to and from events."""
