"""Two small T5s, their tasks, their cards, and the scripts that rebuild them."""
