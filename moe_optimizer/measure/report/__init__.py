"""Shows what was planned, proven and measured: one HTML file, its pictures, and two results side by side."""
