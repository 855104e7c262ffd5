"""Training tasks: what each method does in the shared loop, and the data that it reads; one file a task."""
