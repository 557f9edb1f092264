"""What a ladder will cost before it is captured: five terms kept apart, each with a range and a source."""
