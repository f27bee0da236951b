"""Long runs that are started by hand: the fuzzer, kills at random moments, the matrix of versions."""
