"""Where verdicts go: one file each."""
