"""WebShop: buying the product that an instruction describes, in a shop of texts."""
