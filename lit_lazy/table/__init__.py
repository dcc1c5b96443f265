"""Tables of ablations: records, statistics, verdicts and rendering."""
