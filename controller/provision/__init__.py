"""How a pod comes to be: who makes it, where it is asked for, what a refusal means, and where to ask next."""
