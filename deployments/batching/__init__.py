"""The replica's own batching: a pure token-budget planner, collation and the loop around them."""
