"""One replica over its shard axis: which parameters form a unit, and how they are sharded."""
