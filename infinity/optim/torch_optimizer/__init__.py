"""Any optimizer of torch: whether it updates each parameter by itself, and how it is made to."""
