"""What you and your project may do, as Google says."""
