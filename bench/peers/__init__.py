"""What a user would pick instead."""
