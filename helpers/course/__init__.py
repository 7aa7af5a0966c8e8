"""What only the lessons need: their figures, their exercises, the stored costs."""
