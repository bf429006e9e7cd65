"""The host-memory tier (G2): residency, transfers and their bandwidth, private to a rank or shared by all."""
