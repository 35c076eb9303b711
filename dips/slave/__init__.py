"""A slave: a daemon that holds some layers of the model, updates them and serves them."""
