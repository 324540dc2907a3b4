from __future__ import annotations

from hypothesis import settings

# No test asserts a time, and a busy machine takes longer for an example than hypothesis' 200 ms.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")
