"""What commands share: arguments, and texts as a terminal may show them."""
