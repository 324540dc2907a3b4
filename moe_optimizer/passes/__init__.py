"""The optimizations as decisions: each pass says what it would do and why. Nothing here touches anything."""
