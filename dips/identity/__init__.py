"""Who a process is: names in certificates, an offline authority that signs them, and what each role may ask."""
