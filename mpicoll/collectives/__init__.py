"""The methods of `mpicoll.Comm`: what is common, data movement, reductions."""
