"""What planning and passing on costs, apart from any model."""
