"""Reading what servers write: their logs, and the traffic that went through them. Nothing here needs a GPU."""
