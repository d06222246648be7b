"""How many local iterations each sensor takes in a round (paper VI): the latency model, rules, and a learnt agent."""
