/* The engine: lanes, and the one queue on which all of them put what they have finished.
 *
 * Locks are never nested: a lane's lock guards its queue, that of the completions theirs.
 */
#ifndef AIO_ENGINE_H
#define AIO_ENGINE_H

#include <stdint.h>
#include <sys/types.h>

#include "api.h"
#include "completions.h"
#include "lane.h"

struct aio_engine {
    aio_config config;
    pid_t pid; /* of the process that has the lanes */
    struct lane *lanes;
    uint32_t num_lanes; /* started */
    struct completions completions;
};

#endif
