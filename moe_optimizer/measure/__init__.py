"""Everything that measures beside a server."""
