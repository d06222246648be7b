"""Looking at a plant's images before it joins."""
