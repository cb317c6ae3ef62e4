"""A server that is offered more than it can do: who gets in, how quick it stays for them, and how soon it is over."""
