# JupyterLab with the lessons:
#
#     docker build -t pagewise .
#     docker run -p 8888:8888 --name pagewise pagewise
#
# Open the address that it prints. Later, docker start -a pagewise has what you changed. On a GPU with NVIDIA's container
# toolkit, add --build-arg TORCH_INDEX= (an empty value) to the build and --gpus all to the run.
FROM python:3.12-slim-bookworm
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ git make \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 reader \
    && install -d -o reader /pagewise
WORKDIR /pagewise
COPY --chown=reader . .
# torch for CPUs has 0.2 GB. The one of the default index brings the libraries of CUDA, 3 GB.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN PIP_EXTRA_INDEX_URL="$TORCH_INDEX" pip install --no-cache-dir -e "./src/cudascope[cuda]" -e ".[all,pinned]"
USER 1000
# make uses this interpreter and makes no .venv.
ENV PYTHON=/usr/local/bin/python
EXPOSE 8888
CMD ["make", "lab", "LAB=--ip=0.0.0.0 --no-browser"]
