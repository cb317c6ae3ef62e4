"""The cost of planning and passing on, apart from any model."""
