from __future__ import annotations

import json
from pathlib import Path

from moe_optimizer.plan.json_schema import plan_schema

SCHEMA = Path(__file__).parents[2] / "docs" / "schemas" / "plan.schema.json"


def test_the_published_schema_is_that_of_the_types(golden):
    golden(json.dumps(plan_schema(), indent=2) + "\n", SCHEMA)
