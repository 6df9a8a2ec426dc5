#include "blocks.h"

#include "util.h"

struct layout layout_of(uint64_t offset, uint64_t nbytes, uint64_t unit, uint64_t block_bytes) {
    const uint64_t end = offset + nbytes;
    struct layout layout = {offset, end, end, end, block_bytes};
    if (unit) {
        const uint64_t direct_begin = aio_round_up(offset, unit);
        const uint64_t direct_end = aio_round_down(end, unit);
        if (direct_begin < direct_end) {
            layout.direct_begin = direct_begin;
            layout.direct_end = direct_end;
        }
    }
    return layout;
}

struct span span_at(const struct layout *layout, uint64_t position) {
    uint64_t limit = layout->end;
    bool direct = false;
    if (position < layout->direct_begin) {
        limit = layout->direct_begin;
    } else if (position < layout->direct_end) {
        limit = layout->direct_end;
        direct = true;
    }
    return (struct span){position, aio_min(layout->block_bytes, limit - position), direct};
}
