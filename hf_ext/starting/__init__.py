"""Recipes to start from: those of the package, and those written for a user's own data."""
