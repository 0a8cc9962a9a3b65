#!/bin/bash
rm phone.txt
