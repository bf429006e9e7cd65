"""What people touch: scenario files, wiring, reports, checks and the command line."""
