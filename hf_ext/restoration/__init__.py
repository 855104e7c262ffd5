"""Pictures in files: which of them are restored, how, and where the results go."""
