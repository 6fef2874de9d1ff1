from oscine.llm import LLM as LLM
from oscine.llm import AsyncLLM as AsyncLLM

__version__: str
