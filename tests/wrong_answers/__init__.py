"""Wrong answers to the lessons' exercises, written as a learner would, and what the sentence must say."""
