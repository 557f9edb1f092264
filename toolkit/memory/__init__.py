"""Models of memory: the allocator, traces, the ledger and the rules. Pure, no engine and no GPU."""
