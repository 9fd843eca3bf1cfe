"""Which algorithm runs: settings that ranks agreed on, and the automatic choice."""
