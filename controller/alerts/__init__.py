"""Alerts about a run that goes on, but not as it should: what they are, when they are raised, and their record."""
