"""What is kept, and from where on."""
