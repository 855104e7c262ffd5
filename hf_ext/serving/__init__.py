"""The tasks of a merge behind HTTP: what each of them can do, a worker that batches them, and the routes."""
