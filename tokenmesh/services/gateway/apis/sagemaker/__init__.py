"""The interface of SageMaker's containers."""
