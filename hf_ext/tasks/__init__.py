"""Training tasks: the part of each method in the shared loop, and the data that it reads."""
