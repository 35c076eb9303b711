"""The outer step on flat arrays: kernels, and the versions and slots that they work on."""
