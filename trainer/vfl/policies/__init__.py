"""How many local iterations each sensor takes in a round: the latency model, rules, trained agents."""
