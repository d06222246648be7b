"""Extensions of the product: each has a folder, and the kernel names none of them."""
