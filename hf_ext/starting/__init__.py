"""Where a newcomer starts: recipes that travel with the package, and recipes written for data of one's own."""
