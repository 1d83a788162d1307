/* What one backend object owns. */
#ifndef ENGINE_H
#define ENGINE_H

#include "kernels.h"
#include "team.h"

/* Memory for intermediate results. Each grows when a larger step comes, and stays. */
enum Buffer { BUFFER_NORMED, BUFFER_BLOCKS, BUFFER_PROJECTED, BUFFER_ATTENDED, BUFFER_HIDDEN, BUFFER_CHOSEN,
              BUFFER_TURNS, BUFFER_PARTIAL, BUFFER_ENDED, BUFFER_THREADS,
              BUFFER_PEAKS, BUFFER_KEYS, BUFFERS };

struct Engine {
    Team *team;
    const Kernels *kernels;
    void *buffer[BUFFERS];
    size_t bytes[BUFFERS];
};

/* The buffer, at least so large; NULL if there is no memory. Contents are undefined. */
void *engine_buffer(Engine *e, enum Buffer which, size_t bytes);

#endif
