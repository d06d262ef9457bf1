"""What makes responses durable: their logs, who writes them, who takes over, who reads them."""
