"""Side by side with what a user would pick instead: programs that measure, and a list of figures."""
