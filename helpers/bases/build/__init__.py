"""What made the bases and their scores: run by hand, never by a lesson."""
