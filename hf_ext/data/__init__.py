"""The user's data: recognition, opening, and splits for evaluation."""
